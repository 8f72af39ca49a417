"""HPP on a Ray cluster: many prompts, a server, and profiles of a corpus, each with one engine per node.

    import ray, hpp.ray

    prompts = ray.data.read_json("prompts.jsonl")
    answers = hpp.ray.jobs(prompts, "model/", work="answers.work")
    answers.write_json("answers")

`pip install 'ray[data,serve]'` installs Ray; nothing else of this package needs it. Every node needs this package, ONNX Runtime, and the
model under the same path. docs/PYTHON.md has the rest.
"""

from ._ray_jobs import Engine, jobs
from ._ray_nodes import kind_of_this_node
from ._ray_profile import profile
from ._ray_serve import ConversationRouter, conversation, server

__all__ = [
    "ConversationRouter",
    "Engine",
    "conversation",
    "jobs",
    "kind_of_this_node",
    "profile",
    "server",
]
