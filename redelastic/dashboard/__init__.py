"""The dashboard: a web page for all runs on one Redis, live.

``reader`` reads Redis, once for all browsers that watch; ``view`` turns a run into the page's JSON; ``feed`` sends
it to each browser, first whole, then as JSON merge patches; ``actions`` asks runs for what people want;
``app`` is the web application and its guards. ``page/``
holds what the browser runs: one HTML file, a style sheet and a few modules; nothing is built or loaded from outside.
``standalone`` makes one file of them and of a run's data, for ``redelastic timeline``; it needs no extra.

What one update costs when every node has sent a heartbeat, with 8 GPUs a node, on 2 busy cores on 2026-11-24
(``python -m tests.support.crowds 1000``; every browser is sent the same bytes):

===== ============= =============== ================ ===================
nodes whole page    update          CPU to read it   CPU to tell changes
===== ============= =============== ================ ===================
1     2,187 bytes   286 bytes       under 1 ms       under 1 ms
30    30,461 bytes  7,642 bytes     4 ms             under 1 ms
1,000 935,642 bytes 253,315 bytes   170 ms           16 ms
===== ============= =============== ================ ===================
"""
