"""The cost of failures to a training job: a simulation with the state machines of the product.

`cluster` says what a job runs on and when what fails. `formation` plays a failure through the
master's own state machines (`remesh.elastic.job`, `.liveness`), with a clock that is
simulated: how long it takes until the failure is noticed and the next world is formed. `training`
runs a job over weeks of failures with one strategy for its state, and says what was trained, what
was lost, and what was moved. `advice` compares strategies and finds how often to save.

Nothing here starts a process or imports torch.
"""
