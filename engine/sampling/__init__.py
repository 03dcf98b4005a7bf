"""From logits to tokens: parameters, rules, constraints, random numbers."""
