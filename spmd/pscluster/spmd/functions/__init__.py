"""NumPy's functions for global arrays, by what they do to axes. Importing this registers them.

Each says which labels its axes have, and calls the same function on the blocks: the layouts follow from the rule, by
`applying.apply`.
"""

from pscluster.spmd.functions import along as along
from pscluster.spmd.functions import elementwise as elementwise
from pscluster.spmd.functions import indexing as indexing
from pscluster.spmd.functions import joining as joining
from pscluster.spmd.functions import linear_algebra as linear_algebra
from pscluster.spmd.functions import norms as norms
from pscluster.spmd.functions import products as products
from pscluster.spmd.functions import queries as queries
from pscluster.spmd.functions import reductions as reductions
from pscluster.spmd.functions import shapes as shapes
from pscluster.spmd.functions import updating as updating
from pscluster.spmd.functions import windows as windows
