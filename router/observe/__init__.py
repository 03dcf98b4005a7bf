"""What can be seen of a router: metrics, traces, and the page at `/`."""
