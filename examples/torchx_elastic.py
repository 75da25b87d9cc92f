"""A component of TorchX that starts `redelastic run` on each replica.

    torchx run -s local_cwd torchx_elastic.py:elastic --script train.py
    torchx run -s slurm torchx_elastic.py:elastic --script train.py --nodes 4 --min_nodes 2 --nproc_per_node 8 --gpu 8

The replicas find Redis by REDELASTIC_REDIS_URL.
"""

from torchx import specs


def elastic(
    *arguments: str,
    script: str,
    nodes: int = 2,
    min_nodes: int = 1,
    nproc_per_node: int = 1,
    redis: str = "",
    image: str = "registry.example/train:1",
    cpu: int = 2,
    gpu: int = 0,
    memory: int = 8192,
    retries: int = 0,
) -> specs.AppDef:
    """Train on a changing number of nodes.

    Args:
        arguments: of the script.
        script: the training script.
        nodes: how many replicas are started.
        min_nodes: with how few of them to train.
        nproc_per_node: workers on each.
        redis: URL of Redis, if the scheduler does not pass on REDELASTIC_REDIS_URL; it is written into the job.
        image: has torch, redelastic and the script; local_cwd and slurm take none.
        cpu: CPUs of each replica.
        gpu: GPUs of each replica.
        memory: memory of each replica, in MB.
        retries: how often the scheduler may start replicas again.
    """
    node = specs.Role(
        name="node",
        image=image,
        entrypoint="redelastic",
        args=[
            "run",
            f"--rdzv-id={specs.macros.app_id}",  # a new one for each job
            f"--nnodes={min_nodes}:{nodes}",
            f"--nproc-per-node={nproc_per_node}",
            "--max-job-restarts=100",
            "--drain-timeout=15",  # with --shutdown-timeout below the 30 s that Kubernetes grants by default
            "--shutdown-timeout=10",
            script,
            *arguments,
        ],
        env={"REDELASTIC_REDIS_URL": redis} if redis else {},
        num_replicas=nodes,
        min_replicas=min_nodes,
        max_retries=retries,
        retry_policy=specs.RetryPolicy.REPLICA,  # the others stay
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memory),
    )
    return specs.AppDef(name="elastic", roles=[node])
