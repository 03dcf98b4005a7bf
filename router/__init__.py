"""The router: the public gRPC service, and the choice of which workers run a request.

It holds text: it tokenizes, validates, queues, places, assembles tokens in order, finds stop strings and streams. It
knows workers only through `WorkerService.Session`, and neither torch nor Ray nor the engine.
"""
