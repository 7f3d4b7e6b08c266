"""Campaigns: faults at random moments, many times over, drawn from a seed.

By default each plays a short run. `REMESH_CAMPAIGN=1000` makes the runs long: so many kills and
failing storages, and ten times as many damaged checkpoints. `REMESH_CAMPAIGN_SEED` draws others.
What happens in a run depends on the seed and the number of the run alone, apart from what happens
by the clock; a failure names both.
"""
