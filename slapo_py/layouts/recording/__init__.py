"""One run of a scheduled module as one flat graph: what it computes, where its modules begin and end."""
