"""`baton bench`: a load offered to a server, and what its clients saw.

workload    which requests come, and when
targets     a server, over gRPC or OpenAI's API
samples     what one client saw
runner      offers the load
figures     what it amounts to, under the names that vLLM's `bench serve` gives it
"""
