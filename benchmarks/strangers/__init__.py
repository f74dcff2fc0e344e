"""Other people's training steps under splitjax: `adapters` reads them from public checkouts."""
