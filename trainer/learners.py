"""Which learner a configuration asks for."""

from rallypoint.daemon.shared.config import Config
from rallypoint.trainer.distill import DistillLearner
from rallypoint.trainer.ppo import PpoLearner


def learner_type(config: Config) -> type[PpoLearner]:
    """A student where there is a teacher, else PPO."""
    return PpoLearner if config.distill.teacher is None else DistillLearner
