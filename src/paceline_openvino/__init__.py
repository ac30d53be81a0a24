"""OpenVINO for paceline: an engine for folders of OpenVINO IR, with many sequences in a call.

Such folders are on the hub (names that end with `-ov`), and exporters such as optimum's make them.
An entry point in pyproject.toml adds the engine to paceline, which knows no name of this package.
"""
