"""Plain functions that are called on the blocks of a mesh's devices, and the collectives that they may call.

`calls` runs them, `collectives` is what they call, `rounds` decides which collectives can be carried out, `transfer`
carries them out.
"""
