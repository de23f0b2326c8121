"""Operations on global arrays recorded as programs, put in order, and sent to whoever has the devices."""
