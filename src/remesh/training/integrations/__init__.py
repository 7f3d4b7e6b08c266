"""Training frameworks: each module fits a `remesh.Manager` into the loop of one of them.

Nothing is imported here, and a module imports the framework that it is for: `huggingface`
(transformers), `lightning`. Accelerate and torchtitan need no module, for what they prepare can be
put into a state as it is.
"""
