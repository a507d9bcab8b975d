"""Tasks of the labs, by the names that their recipes give: `train` and `val` of each kind."""

from world import conversations, one_thing


def retry_train():
    return one_thing("train")


def retry_val():
    return one_thing("val")


def chat_train():
    return conversations("train", turns=6, tasks=600)


def chat_val():
    return conversations("val", turns=6, tasks=48)


def tools_train():
    return conversations("train", turns=20, tasks=600)


def tools_val():
    return conversations("val", turns=20, tasks=24)


def long_train():
    return conversations("train", turns=3, tasks=600, talk=True)


def long_val():
    return conversations("val", turns=3, tasks=24, talk=True)
