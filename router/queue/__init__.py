"""Admission and the waiting queue: limits, fairness between tenants, quotas."""
