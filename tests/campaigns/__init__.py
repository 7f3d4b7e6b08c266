"""Campaigns: faults at random moments, many times over, drawn from a seed.

`make test` plays each in a short form, `make test-nightly` plays 1,000 kills, failing storages,
saves that read flipped bits and runs on a network that fails, 10,000 damaged checkpoints and 30,000
losses of power.
`REMESH_CAMPAIGN_SEED` draws others. What happens in a run depends on the seed and the number of the
run alone, apart from what happens by the clock; a failure names both.
"""
