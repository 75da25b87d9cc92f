"""How we reach Redis: an endpoint, a client, calls that retry, scripts, keys, and a private server."""
