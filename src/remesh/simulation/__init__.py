"""The cost of failures to a training job: a simulation of weeks, in a second or two.

`cluster` says what a job runs on and when what fails. `training` runs a job over weeks of failures
with one strategy for its state, and says what was trained, what was lost, and what was moved.
`advice` compares strategies and finds how often to save.

Nothing here starts a process or imports torch.
"""
