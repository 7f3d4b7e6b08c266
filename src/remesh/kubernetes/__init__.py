"""Jobs on Kubernetes: the resource ElasticJob and its operator.

An ElasticJob names a script, a range of workers and a pod template (`resource`). The operator gives
each job a master pod behind a service, and worker pods that run `remesh run` (`pods`). The
decisions are a pure function, `reconcile.reconcile`: a job, its pods and the master's status go in,
the new status of the job and a list of actions come out. `operator` has the requests, their order,
and says when; `manifests` has what a cluster needs before.

No module here imports torch.
"""
