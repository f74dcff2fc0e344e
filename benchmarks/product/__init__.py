"""How long a stranger needs, from a clone to the first plan, to the demo's end and to the site; and what the site
holds: pages, code blocks that run, the rank of the right page among what its search returns.

    python -m benchmarks product                everything, and its page (ten minutes; needs git, the
            network for packages, and a Chromium)
    python -m benchmarks product --only site    what needs no installation: words, blocks, pages, search, screenshots

Each figure of time is taken in a clone of its own, of this checkout's last commit, with an environment of its own.
Compiled programs are kept in a folder that is empty before; what pip has in its cache is said on the page.
"""
