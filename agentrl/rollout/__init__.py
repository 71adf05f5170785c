"""Rollouts: the token bridge, the policies that sample, and the collector that runs episodes."""
