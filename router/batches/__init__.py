"""Batches of requests that can wait: files of lines, a queue of batches, and the runner that works on it when idle.

`store` says what is kept (`sqlite_store` and `redis_store` keep it), `lines` what input and result files hold, `idle`
when a line may run, `runner` how a batch gets from start to end. Knows no HTTP: how a line is answered is passed in.
"""
