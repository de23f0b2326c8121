"""Operations on global arrays recorded as programs, put in order, and sent to the processes that have the devices."""
