"""Training frameworks: each module fits a `remesh.Manager` into the loop of one of them.

Nothing is imported here, and a module imports the framework that it is for: `huggingface`
(transformers), `lightning`. `torchtitan_style` needs none; Accelerate needs no module, for what it
prepares can be put into a state as it is.
"""
