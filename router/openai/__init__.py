"""The OpenAI API over HTTP, in the router's process: a second door to the same `GenerationService`.

bodies      what clients send, field by field
specs       a body as the GenerationSpecs it asks for
answers     the service's events as completions, chat completions and their chunks
errors      a BatonError as a status and a body
call        one HTTP request in the role of a gRPC call
app         the routes
listener    the socket
"""
