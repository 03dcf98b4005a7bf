"""OpenAI's Responses API: responses made of items, streamed as numbered events, kept, continued, run in the background.

Like `router.openai`, it turns a body into the one internal request and its events into those of the dialect; what
generates them knows neither.
"""
