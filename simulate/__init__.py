"""Baton in virtual time, and what is planned with it: shapes of models, devices, cost curves, plans. Loads no torch."""
