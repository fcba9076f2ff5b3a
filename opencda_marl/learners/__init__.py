"""One algorithm a file. Blind to simulators and environments: they meet in `core.spec`."""

from opencda_marl.core.tables import Table

__all__ = ["LEARNERS"]

LEARNERS = Table(
    "learner",
    "opencda_marl.learners",
    {
        "mappo": "opencda_marl.learners.mappo:Mappo",
        "pcmappo": "opencda_marl.learners.mappo:Mappo",
        "masac": "opencda_marl.learners.masac:make_masac",
        "pcmasac": "opencda_marl.learners.masac:make_masac",
        "qlearning": "opencda_marl.learners.qlearning:Qlearning",
    },
    {
        "mappo": "multi-agent PPO: shared policy, centralised critic",
        "pcmappo": "MAPPO with a reward vector and a preference per vehicle",
        "masac": "multi-agent soft actor-critic: shared policy, twin critics, replay",
        "pcmasac": "MASAC with a reward vector and a preference per vehicle",
        "qlearning": "tabular Q-learning over bins of what a vehicle sees; discrete actions",
    },
)
