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
        "matd3": "opencda_marl.learners.matd3:make_matd3",
        "pcmatd3": "opencda_marl.learners.matd3:make_matd3",
        "dqn": "opencda_marl.learners.dqn:make_dqn",
        "qlearning": "opencda_marl.learners.qlearning:Qlearning",
    },
    {
        "mappo": "multi-agent PPO: shared policy, centralised critic",
        "pcmappo": "MAPPO with a reward vector and a preference per vehicle",
        "masac": "multi-agent soft actor-critic: shared policy, twin critics, replay",
        "pcmasac": "MASAC with a reward vector and a preference per vehicle",
        "matd3": "multi-agent TD3: shared deterministic policy, twin critics, delayed updates, replay",
        "pcmatd3": "MATD3 with a reward vector and a preference per vehicle",
        "dqn": "deep Q-network with double Q-learning: a value per level, replay; discrete actions",
        "qlearning": "tabular Q-learning over bins of what a vehicle sees; discrete actions",
    },
)
