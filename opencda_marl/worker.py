"""A worker other than the first: started by `train` as a child process, or by torchrun.

It has a simulation and a learner of its own and no run folder: what there is to write goes to worker 0.
"""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from torch.distributed import FileStore  # type: ignore[attr-defined] # torch does not list it
from torch.distributed.distributed_c10d import Store

from opencda_marl.assemble import make_env, make_learner, make_roads, make_simulator, quiet_process, warm_up
from opencda_marl.config import from_yaml
from opencda_marl.core.children import answer, end_with_parent, read_request
from opencda_marl.core.errors import Interrupted, OpenCDAError, WorkerError
from opencda_marl.core.spans import Spans
from opencda_marl.core.stopping import StopRequest
from opencda_marl.core.torchrun import Place
from opencda_marl.crew import Crew, device_of, read_posted_config, under_torchrun
from opencda_marl.member import Member
from opencda_marl.train import run_loop, without_surprises

__all__ = ["assist"]


def assist(place: Place, store: Store | None = None) -> None:
    """Drive and learn along until worker 0 says that the run is over.

    Args:
        place: of this worker; not the first.
        store: where the workers find each other; None: torchrun's.

    Raises:
        Interrupted: somebody asked this process, or another worker, to stop.
        OpenCDAError: what went wrong here, or with another worker.
    """
    address = None if store is None else "127.0.0.1"
    store = under_torchrun(place) if store is None else store
    settings = from_yaml(read_posted_config(store))
    device, _ = device_of(settings.device, place)
    settings = replace(settings, device=device)
    spans = Spans(enabled=settings.recording.spans)
    with StopRequest() as stop, quiet_process(settings.threads):
        simulator = make_simulator(settings, make_roads(settings), spans=spans)
        env = make_env(settings, simulator=simulator, spans=spans)
        with closing(simulator), closing(env), closing(Crew(place, store, spans, stop, settings, address)) as crew:
            crew.begin()
            learner = make_learner(settings, env.observation_spec, env.action_spec, group=crew.group)
            with closing(learner):
                warm_up(settings, simulator, learner)
                crew.agree(learner.describe())
                start = crew.receive()
                if start.state is not None:
                    learner.load(start.state, weights_only=start.weights_only)
                member = Member(settings, learner, spans, crew, start.episodes)
                try:
                    with without_surprises():
                        run_loop(env, learner, member, stop, spans, crew)
                except WorkerError:
                    if not stop.requested():
                        raise
                if not crew.over:
                    with suppress(WorkerError):  # the others may have gone already
                        crew.meet("stop", 0.0)
                    raise Interrupted("stopped: worker 0 has what is saved")


def _main(path: str) -> None:
    """The child of a run that was started without torchrun."""
    end_with_parent()
    request = read_request(path)
    rank, size = int(request["rank"]), int(request["size"])
    said: dict[str, Any] = {}
    try:
        assist(Place(rank, size, rank, size), FileStore(str(request["store"]), size))
    except OpenCDAError as error:
        said = {"error": type(error).__name__, "message": error.message, "fix": error.fix}
        if error.__cause__ is not None:
            sys.stderr.write(f"{type(error.__cause__).__name__}: {error.__cause__}\n")  # its log, beside the run's
    answer(request, said)


if __name__ == "__main__":
    _main(sys.argv[1])
