"""`baton bench`: sends a load to a server and measures what its clients see.

workload    which requests are sent, and when; sends them; what one client saw
targets     a server, over gRPC or OpenAI's API
figures     the figures of a run, under the names of vLLM's `bench serve`, and pictures of runs
"""
