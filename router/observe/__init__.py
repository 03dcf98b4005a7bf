"""The views of a router for those who watch it: metrics, traces, and the page at `/`."""
