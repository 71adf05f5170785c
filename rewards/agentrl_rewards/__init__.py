"""Reward components that come with agentrl: `sql` for queries, `conduct` for how an agent behaves in any environment.

All scores lie in [0, 1], and more is better: a component named after a vice scores how far it was avoided.
"""
