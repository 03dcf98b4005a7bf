"""The OpenAI API over HTTP, in the router's process: it calls the same methods as gRPC.

bodies        what clients send, field by field
specs         a body as the GenerationSpecs it asks for
answers       the types of all answers
completions   the service's events as completions, chat completions and their chunks
generating    how a body is answered: whole, streamed, or as a line of a batch
http          requests, refusals and routes of every kind; errors: a BatonError as a status and a body
app, files, batches   the routes; schema: their OpenAPI document
"""
