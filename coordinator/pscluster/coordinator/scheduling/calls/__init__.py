"""A call as the job holds it: the function with its arguments, its result, its errors and its questions."""
