"""The dashboard: a read-only web page for all runs on one Redis, live.

``reader`` reads Redis, once for however many browsers look; ``view`` says what the page shows, as JSON; ``feed`` sends
that to each browser, first whole, then as JSON merge patches; ``app`` is the web application and its guards. ``page/``
holds what the browser runs: one HTML file, a style sheet and a few modules; nothing is built or loaded from outside.
"""
