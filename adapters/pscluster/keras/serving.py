"""`serve`: puts the weights of a Keras model on the parameter servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import FunctionHandle, capture
from pscluster.core.ids import fresh_id
from pscluster.keras.making import check_backend, class_of, make_model
from pscluster.keras.optimizers import mapped
from pscluster.keras.own_steps import has_own
from pscluster.keras.served import ServedModel, model_functions, numpy_of
from pscluster.keras.tables import chosen
from pscluster.ps.handles.gradients.parameters import Parameter, create_variables
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.scope import current_creator


def serve(
    model_fn: Callable[[], Any],
    *,
    optimizer: Optimizer | None = None,
    tables: Mapping[str, Optimizer] | Sequence[str] | None = None,
    name: str = "model",
) -> ServedModel:
    """Put the weights of a Keras model on the parameter servers. Call it in `strategy.scope()`.

        def model_fn():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"])
            return model

        with strategy.scope():
            served = pscluster.keras.serve(model_fn)
        coordinator.fit(served, data, epochs=5)

    Args:
        model_fn: returns a compiled model whose weights exist (it has an `Input`, or was built). Called here, and once
            in each worker's process.
        optimizer: one of `pscluster.coordinator.optimizers`, made in the same scope. Default: one with the
            hyperparameters of the model's own.
        tables: which `layers.Embedding` become tables, of which a step reads and pushes only the rows of its batch:
            patterns such as "embedding*" for the names of layers, or the paths of their weights; with an optimizer
            each, or in a list for that of the model. One whose weight is also used whole is served whole, which is
            logged.
        name: begins the names of the variables; Keras' path follows: "model/sequential/dense/kernel".

    Raises:
        TypeError: `model_fn` is not a function that returns a Keras model, or another argument is of a wrong type.
        ValueError: a pattern of `tables` fits no embedding.
        MisuseError: the model is not built or compiled, or its optimizer is none that the servers have; the message
            lists those. Or a weight has a constraint, or an embedding that `tables` names a regularizer or a call of
            its own. Nothing was made.
        ConfigurationError: Keras' backend is neither JAX nor torch.
    """
    if not callable(model_fn) or hasattr(model_fn, "trainable_variables"):
        hint = ": give a function that makes and compiles it" if callable(model_fn) else ""
        raise TypeError(f"serve takes a function that returns a Keras model, not {type_of(model_fn)}{hint}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer is {type_of(optimizer)}; give one of pscluster.coordinator.optimizers, or compile the model "
            "with Keras' own"
        )
    creator = current_creator(f"serve({name!r})")
    backend = check_backend()
    import keras

    policy = keras.config.dtype_policy().name
    model = make_model(model_fn, policy)
    _check_model(model)
    copy = class_of(backend)(model)
    weights = copy.describe()
    of_tables = chosen(model, tables)
    if of_tables and has_own(model, "train_step"):
        raise MisuseError(
            f"{type(model).__name__} has a train_step of its own, which would see no gradients of the rows of tables: "
            "leave out tables=, or override compute_loss in its place"
        )
    parameters: dict[str, Parameter] = {}
    for weight, variable in zip(weights, copy.weights, strict=True):
        own = path = f"{name}/{weight.path}"
        number = 0
        while own in parameters:  # layers of a subclass may have one name
            own, number = f"{path}_{number + 1}", number + 1
        parameters[own] = Parameter(numpy_of(variable), trainable=weight.trainable)
    handle = FunctionHandle(capture(model_fn, policy=creator.serialization))
    model_functions[handle] = model_fn
    variables = create_variables(parameters, f"serve({name!r})")
    try:
        if optimizer is None:
            optimizer = mapped(model.optimizer, f"{name}/optimizer")
    except BaseException:
        for variable in variables.values():
            creator.delete_variable(variable)
        raise
    own_test = type(model).__name__ if has_own(model, "test_step") else ""
    names = list(variables)
    by_table = {names[index]: of_tables[index] or optimizer for index in sorted(of_tables)}
    return ServedModel(name, optimizer, variables, by_table, handle, weights, fresh_id(), backend, policy, own_test)


def _check_model(model: Any) -> None:
    """Raise TypeError or MisuseError if a model can't be served."""
    import keras

    if not isinstance(model, keras.Model):
        raise TypeError(f"model_fn returned {type_of(model)}; it must return a Keras model")
    if not model.compiled:
        raise MisuseError(f"the model {model.name!r} is not compiled: call model.compile(...) in model_fn")
    if not model.built or not model.trainable_variables:
        raise MisuseError(
            f"the model {model.name!r} has no trainable weights yet: begin it with keras.Input(shape), or call it "
            "once in model_fn, on zeros of the shape of a batch"
        )
    for variable in model.trainable_variables:
        if variable.constraint is not None:
            raise MisuseError(
                f"{variable.path!r} has the constraint {type(variable.constraint).__name__}, which the servers don't "
                "apply after their updates: make its layer without, or with a regularizer in its place"
            )
