"""The choice of the workers that run a request: the fleet, its load and prefix caches, the policies, and the
dispatcher."""
