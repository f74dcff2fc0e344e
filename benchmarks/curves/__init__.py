"""Training curves under splitjax beside those of one device: cases, runs, comparisons, the page."""
