"""Anthropic's Messages API over HTTP, beside OpenAI's and on top of the same service.

bodies    what clients send, field by field
specs     a body as the GenerationSpec it asks for
answers   the types of all answers and events
events    the service's events as a message, or as the events of one
errors    a failure as Anthropic's clients know failures
app       the routes
"""
