"""The operator of the simulated job: stops it while things go wrong, and does what the documents ask of
operators where an end was heard of by some nodes only."""

from typing import Final

from rallypoint.ops.simulation.cluster import Cluster
from rallypoint.ops.simulation.faults import Faults

_AGAIN_S: Final = 20.0
"""An operator looks again after this time."""


class Operator:
    """Whoever started the supervisors. ``faults``: what goes wrong meanwhile."""

    def __init__(self, cluster: Cluster, faults: Faults) -> None:
        self._cluster = cluster
        self._faults = faults
        self._calm = False
        """Nothing went wrong any more when the job was stopped last, so that all are back by now."""

    def begin(self) -> None:
        """Stop the job at some time, or let it finish, as its scenario says."""
        cluster, scenario = self._cluster, self._cluster.scenario
        if scenario.end == "stopped":
            cluster.clock.after(cluster.choose.uniform(5.0, scenario.faulty_s), self._stop)
        elif scenario.end == "finished":
            cluster.clock.after(scenario.faulty_s, self._start_again)

    def _stop(self) -> None:
        """Stop the job on some node, and again if that had no effect.

        A node whose worker is in no generation leaves alone. What it leaves may be too little to train with
        (rules 5 and 11 of membership): the others then hold until they are stopped too. One by one, with
        the time in between that it takes to see whether a stop had an effect, that would last for `_AGAIN_S`
        times the number of nodes, and no time is long enough for every cluster.
        """
        cluster, faults = self._cluster, self._faults
        if cluster.checks.ended:
            return
        if self._calm and self._cannot_train():
            for node in cluster.nodes:
                faults.stop_on(node)
        else:
            faults.stop_job()
        self._calm = faults.mended
        cluster.clock.after(_AGAIN_S, self._stop)

    def _cannot_train(self) -> bool:
        """Whether those that are there are too few, or hold nothing of what was trained."""
        cluster, job = self._cluster, self._cluster.checks.job
        up = [node for node in cluster.nodes if node.up]
        few = sum(cluster.scenario.slots[n.index] for n in up) < cluster.scenario.min_workers
        lives = any(w.last_formed >= max(1, job.formed) for w in cluster.living())
        holds = lives or any(cluster.readable(node) for node in up)
        return few or (job.checkpoint is not None and not holds)

    def _start_again(self) -> None:
        """Start nodes again that left because all had agreed that the job is finished, where nobody could
        write that (a known limit): the job goes on with them to its end, which some have not heard of."""
        cluster, faults = self._cluster, self._faults
        if cluster.checks.ended:
            return
        for node in cluster.nodes if faults.mended else ():
            if node.asked_to_stop and not node.up and node.index not in faults.gone:
                cluster.log(f"the operator starts {node.name} again")
                node.start()
        cluster.clock.after(_AGAIN_S, self._start_again)
