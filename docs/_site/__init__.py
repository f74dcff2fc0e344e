"""What the site's configuration needs: its tables of contents, and docstrings as Sphinx reads them."""
