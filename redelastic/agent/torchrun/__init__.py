"""Counterparts of torch's parts: launcher, regrouping agent, role exchange and exit barrier."""
