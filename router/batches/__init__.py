"""Batches of requests that can wait: files of lines, a queue of batches, and who works on it in idle capacity.

`records` are what is kept, `store` where (`sqlite_store`, `redis_store`), `input_lines` what a file of requests must
be, `idle` when a line may run, `runner` what becomes of a batch. Knows no HTTP: how one line is answered it is given.
"""
