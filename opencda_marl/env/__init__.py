"""What vehicles see, do and earn; wired around a simulator in `env.driving`."""

from opencda_marl.core.tables import Table

__all__ = ["CONTROLLERS", "OBSERVATIONS", "REWARDS"]

CONTROLLERS = Table(
    "controller",
    "opencda_marl.controllers",
    {
        name: f"opencda_marl.env.controllers:{made}"
        for name, made in (
            ("random", "Random"),
            ("full_speed", "FullSpeed"),
            ("priority", "Priority"),
            ("all_way_stop", "Priority"),
            ("signals", "Priority"),
            ("rule_based", "RuleBased"),
        )
    },
    {
        "random": "a uniformly random share of the envelope, drawn anew at each decision",
        "full_speed": "as fast as the limits and comfortable braking allow, whoever is in the way",
        "priority": "SUMO's own drivers under its own right of way",
        "all_way_stop": "SUMO's own drivers at a four-way stop",
        "signals": "SUMO's own drivers at traffic lights",
        "rule_based": "first come, first served: reserves its time in every conflict zone, keeps its distance",
    },
)

OBSERVATIONS = Table(
    "observation",
    "opencda_marl.observations",
    {name: f"opencda_marl.env.observe:{name}" for name in ("full", "plain", "ego9", "ego43")},
    {
        "full": "24 features of the vehicle and a row of 38 for each other that matters",
        "plain": "as full, but rows have nothing of zones, times and stopping distances: for ablations",
        "ego9": "9 features of the vehicle alone",
        "ego43": "8 features of the vehicle and 7 of each of the five nearest",
    },
)

REWARDS = Table(
    "reward part",
    "opencda_marl.rewards",
    {
        name: f"opencda_marl.env.reward:{name.upper()}"
        for name in (
            "delay",
            "time",
            "progress",
            "progress_potential",
            "arrival",
            "collision",
            "near_miss",
            "yielding",
            "acceleration",
            "jerk",
            "stop",
        )
    },
    {
        "delay": "time lost against driving at the limits [s]",
        "time": "time spent inside [s]",
        "progress": "distance driven [m]",
        "progress_potential": "distance as a potential: discounted, taken back by a crash [m]",
        "arrival": "1 on arrival",
        "collision": "1 on a crash, for each party",
        "near_miss": "graded closeness to an occupied zone or the leader [s]",
        "yielding": "braking while a conflict is predicted [s]",
        "acceleration": "squared acceleration over time [m^2/s^3]",
        "jerk": "change of acceleration [m/s^2]",
        "stop": "time spent standing [s]",
    },
)
