"""How good a model is: tasks with answers, and bits per byte of texts that it has not seen.

`tasks` reads questions, `prompts` writes them out as tokens, `scoring` asks the model, `benchmark` counts the right
answers and says with `statistics` how sure that is. `corpora` measures whole texts and shards, without questions.
"""
