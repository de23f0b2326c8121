"""Values: nested Python data to and from `pscluster.v1.Value`, without pickle.

Supported: None, bool, int of any size, float, complex, str, bytes, list, tuple, dict, set, frozenset, NumPy arrays and
scalars, anything else with `__array__` (a PyTorch CPU tensor or a JAX array arrives as a NumPy array), dataclass
instances, named tuples, and handles. Anything else is refused; the error gives its path in the structure.

Some things change on the way: a bytearray or memoryview arrives as bytes; an instance of a subclass of the types above,
such as an OrderedDict or a `torch.Size`, as one of the plain type; an array in C order, in native byte order and in
memory of its own. An object that occurs twice arrives as two.

Large arrays travel beside the message, as attachments. They are views of the sender's memory, so the sender must copy
them or write them out before the caller may change the array.
"""

from pscluster.core.values.decoding import HandleResolver, decode, decode_call
from pscluster.core.values.encoding import describe, encode, encode_call
from pscluster.core.values.splicing import splice
from pscluster.core.values.structures import map_structure

__all__ = ["HandleResolver", "decode", "decode_call", "describe", "encode", "encode_call", "map_structure", "splice"]
