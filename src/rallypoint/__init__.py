"""rallypoint: elastic, fault-tolerant training for robot-learning RL.

The four packages below this one are links to the folders at the root of the project
(``daemon -> ../../daemon`` and so on). The root folders are the only real code; the links give
them one import name that cannot collide with other distributions, and make this an ordinary
``src`` layout to pip, mypy, pyright and pytest. Always import ``rallypoint.daemon``, never
``daemon``: the short name would load a second copy of every module.
"""

__version__ = "0.1.0"
