"""Python functions of global arrays, called once to see what they do: programs, explanations, and local functions."""
