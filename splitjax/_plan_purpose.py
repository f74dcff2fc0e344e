"""What a planned collective is for, as data, and the sentence that people read of it.

Whoever predicts a collective gives its `Purpose`; whoever asks what a collective is for compares purposes. The
sentences are in one table, `_SENTENCES`, and are only ever read by people: no module searches or compares them.
"""

from __future__ import annotations

import dataclasses
import enum
import string
from collections.abc import Mapping


class Phase(enum.StrEnum):
    """Names the part of a step that a collective belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class PurposeKind(enum.StrEnum):
    """Names what a collective does for a step. "Split" alone is column-split: each device has some output features."""

    # Of one parameter, `Purpose.leaf`.
    GRADIENT = "gradient"  # sums its gradient over the workers that have a summand of it
    GRADIENT_ONTO_STATE = "gradient_onto_state"  # sums its gradient, of which each worker then has a part
    GRADIENT_GROUPS = "gradient_groups"  # puts its gradients together, where devices have those of groups
    GRADIENT_HANDED = "gradient_handed"  # gives its summed gradient to workers that did not compute it
    GRADIENT_ROWS = "gradient_rows"  # sums the rows of a table's gradient, by `Purpose.scheme`
    NEW_VALUE = "new_value"  # puts together its new value, of which each worker has updated a part
    STORED_WEIGHT = "stored_weight"  # gathers it for a pass, where it is split for storage alone
    DEALT_COLUMNS = "dealt_columns"  # deals its columns out, where it holds several weights side by side
    COPIED_COLUMNS = "copied_columns"  # copies columns that were dealt out to all devices: heads that they share
    DEALT_GRADIENT = "dealt_gradient"  # takes its gradient's columns back from where `DEALT_COLUMNS` brought them

    # Of one batch, `Purpose.leaf`.
    TURN_EXAMPLES = "turn_examples"  # gives each device its share of every turn of a loop that the batch is cut into

    # Of one running average of the activations of a batch, `Purpose.leaf`.
    STATISTIC = "statistic"  # sums a statistic of the batch over the devices that have its examples
    STATISTIC_COTANGENT = "statistic_cotangent"  # sums the cotangent of what is made of it and meets every example

    # Crossings: replicated layers have each worker's own examples, split layers those of the whole group.
    ENTER_COLUMNS = "enter_columns"  # brings the examples of the group to a column-split layer
    RETURN_COLUMNS = "return_columns"  # sums the cotangents of what came by `ENTER_COLUMNS`, onto their workers
    ENTER_ROWS = "enter_rows"  # brings the group's examples to a row-split layer, to each device its features
    RETURN_ROWS = "return_rows"  # takes the cotangents of what came by `ENTER_ROWS` back
    LEAVE_COLUMNS = "leave_columns"  # takes the outputs of a column-split layer to the workers whose examples they are
    COTANGENTS_TO_COLUMNS = "cotangents_to_columns"  # takes the cotangents of `LEAVE_COLUMNS` back
    STREAM_TO_COLUMNS = "stream_to_columns"  # gives workers' examples for columns, which a split layer's output meets
    STREAM_COTANGENT = "stream_cotangent"  # takes the cotangents of `STREAM_TO_COLUMNS` back
    LEAVE_ROWS = "leave_rows"  # sums partial outputs of a row-split layer, onto the workers whose examples they are
    COTANGENTS_TO_ROWS = "cotangents_to_rows"  # takes the cotangents of `LEAVE_ROWS` back

    # Between layers that see the same examples.
    WHOLE_FEATURES = "whole_features"  # gathers the output of the column-split `Purpose.source` for a layer that is too
    WHOLE_FEATURES_COTANGENT = "whole_features_cotangent"  # sums the cotangent of `WHOLE_FEATURES` onto its parts
    WHOLE_STATE = "whole_state"  # gathers the state of a column-split recurrent layer, which its next iteration reads
    WHOLE_OUTPUT = "whole_output"  # gathers the output of a column-split layer for a layer that is not split
    COLUMNS_COTANGENT = "columns_cotangent"  # sums the input's cotangent over the columns of a column-split layer
    ROWS_OUTPUT = "rows_output"  # sums partial outputs of a row-split layer, which all its devices then have
    ROWS_COTANGENT = "rows_cotangent"  # gathers the input's cotangent, of which a row-split layer gives parts
    REDUCED_FEATURES = "reduced_features"  # reduces the columns that each device has of a column-split output
    SAVED_INPUT = "saved_input"  # gathers what a rematerialised layer reads, of which each device keeps a part
    SHARED_HEADS = "shared_heads"  # sums the cotangent of each head of an attention over the devices that share it
    WHOLE_HEADS = "whole_heads"  # gathers the cotangents of heads that devices share, for weights that are whole

    # Experts, of which each device has some.
    TO_EXPERTS = "to_experts"  # takes tokens to the device of their expert
    TO_EXPERTS_COTANGENT = "to_experts_cotangent"  # takes the cotangents of `TO_EXPERTS` back
    FROM_EXPERTS = "from_experts"  # takes results to the device of their token
    FROM_EXPERTS_COTANGENT = "from_experts_cotangent"  # takes the cotangents of `FROM_EXPERTS` back
    ALL_EXPERTS = "all_experts"  # gathers the results of all experts, where tokens are everywhere
    ALL_EXPERTS_COTANGENT = "all_experts_cotangent"  # gathers the tokens' cotangents of all experts
    SORTED_ROWS = "sorted_rows"  # brings tokens together that are sorted by expert, or the results that are put back
    SORTED_COTANGENT = "sorted_cotangent"  # brings the cotangents of `SORTED_ROWS` together

    # Fourier transforms of split dims, or, backward, of their cotangents.
    FOURIER_DIM = "fourier_dim"  # gathers a dim that is transformed
    FOURIER_EXAMPLES = "fourier_examples"  # gives examples away for whole features of others

    TOLD = "told"  # only told in words, `Purpose.words`: by a plan that was written before purposes were data


_SENTENCES: Mapping[PurposeKind, str] = {
    PurposeKind.GRADIENT: "gradient of {leaf}",
    PurposeKind.GRADIENT_ONTO_STATE: "gradient of {leaf}, onto its split optimizer state",
    PurposeKind.GRADIENT_GROUPS: "gradient of {leaf}, its groups put together",
    PurposeKind.GRADIENT_HANDED: "gradient of {leaf}, handed to workers that did not compute it",
    PurposeKind.GRADIENT_ROWS: "rows of the gradient of {leaf}, by {scheme}",
    PurposeKind.NEW_VALUE: "new value of {leaf}, from its split optimizer state",
    PurposeKind.STORED_WEIGHT: "{phase}: {leaf} is stored in pieces",
    PurposeKind.DEALT_COLUMNS: "{phase}: columns of {leaf}, which holds several weights, to their devices",
    PurposeKind.COPIED_COLUMNS: "{phase}: columns of {leaf}, of heads that devices share, to all of them",
    PurposeKind.DEALT_GRADIENT: "gradient of {leaf}, its columns back to where they are stored",
    PurposeKind.TURN_EXAMPLES: "{phase}: examples of {leaf}, a share of every turn of a loop to each device",
    PurposeKind.STATISTIC: "{phase}: statistics of the batch for {leaf}",
    PurposeKind.STATISTIC_COTANGENT: "{phase}: cotangent of the batch's statistics for {leaf}",
    PurposeKind.ENTER_COLUMNS: "{phase}: the group's examples enter a split layer",
    PurposeKind.RETURN_COLUMNS: "{phase}: input cotangents return to their workers",
    PurposeKind.ENTER_ROWS: "{phase}: the group's examples enter a row-split layer",
    PurposeKind.RETURN_ROWS: "{phase}: input cotangents return from a row-split layer",
    PurposeKind.LEAVE_COLUMNS: "{phase}: column-split outputs return to their workers",
    PurposeKind.COTANGENTS_TO_COLUMNS: "{phase}: output cotangents enter a column-split layer",
    PurposeKind.STREAM_TO_COLUMNS: "{phase}: what a split layer's output is added to becomes columns",
    PurposeKind.STREAM_COTANGENT: "{phase}: cotangents of what a split layer's output was added to return",
    PurposeKind.LEAVE_ROWS: "{phase}: partial outputs of a row-split layer, summed onto their workers",
    PurposeKind.COTANGENTS_TO_ROWS: "{phase}: the group's output cotangents enter a row-split layer",
    PurposeKind.WHOLE_FEATURES: "{phase}: whole features of the column-split output of {source}",
    PurposeKind.WHOLE_FEATURES_COTANGENT: "{phase}: cotangent of the column-split output of {source}",
    PurposeKind.WHOLE_STATE: "{phase}: whole state of a column-split recurrent layer, in every iteration",
    PurposeKind.WHOLE_OUTPUT: "{phase}: whole features of a column-split output",
    PurposeKind.COLUMNS_COTANGENT: "{phase}: input cotangent of a column-split layer, summed over its columns",
    PurposeKind.ROWS_OUTPUT: "{phase}: partial outputs of a row-split layer",
    PurposeKind.ROWS_COTANGENT: "{phase}: input cotangent of a row-split layer, whole features",
    PurposeKind.REDUCED_FEATURES: "{phase}: reduced columns of a column-split output",
    PurposeKind.SAVED_INPUT: "{phase}: input of rematerialised layers, which is kept in parts",
    PurposeKind.SHARED_HEADS: "{phase}: cotangents of heads, summed over the devices that share each",
    PurposeKind.WHOLE_HEADS: "{phase}: cotangents of all heads that devices share, for the whole weight",
    PurposeKind.TO_EXPERTS: "{phase}: tokens travel to their experts",
    PurposeKind.TO_EXPERTS_COTANGENT: "{phase}: token cotangents return",
    PurposeKind.FROM_EXPERTS: "{phase}: experts' results return",
    PurposeKind.FROM_EXPERTS_COTANGENT: "{phase}: result cotangents travel to their experts",
    PurposeKind.ALL_EXPERTS: "{phase}: results of all experts",
    PurposeKind.ALL_EXPERTS_COTANGENT: "{phase}: token cotangents of all experts",
    PurposeKind.SORTED_ROWS: "{phase}: rows of all devices, sorted by expert",
    PurposeKind.SORTED_COTANGENT: "{phase}: cotangents of rows of all devices, sorted by expert",
    PurposeKind.FOURIER_DIM: "{phase}: {cotangent_of}a Fourier transform, a whole dim",
    PurposeKind.FOURIER_EXAMPLES: "{phase}: {cotangent_of}a Fourier transform, examples for whole features",
    PurposeKind.TOLD: "{words}",
}

# The collectives that sum the gradient of `Purpose.leaf` as a whole array, and all that move it as one.
GRADIENT_SUMS: frozenset[PurposeKind] = frozenset({PurposeKind.GRADIENT, PurposeKind.GRADIENT_ONTO_STATE})
DENSE_GRADIENTS: frozenset[PurposeKind] = GRADIENT_SUMS | {PurposeKind.GRADIENT_GROUPS, PurposeKind.GRADIENT_HANDED}


@dataclasses.dataclass(frozen=True)
class Purpose:
    """Says what a collective is for.

    - `kind`: what it does. `phase`: in which part of the step; None where only words are known.
    - `leaf`: the path of the parameter that it is of; None for activations.
    - `source`: the layer whose output it moves, where the kind names one.
    - `scheme`: by which rows are synchronised.
    - `in_turns`: whether it is done for one worker of a group after another.
    - `again`: whether the forward pass did it before, and rematerialisation repeats it.
    - `words`: a sentence, where no more is known (`PurposeKind.TOLD`).
    """

    kind: PurposeKind
    phase: Phase | None = None
    leaf: str | None = None
    source: str = ""
    scheme: str = ""
    in_turns: bool = False
    words: str = ""
    again: bool = False

    @staticmethod
    def told(words: str) -> Purpose:
        """Returns the purpose of which nothing is known but a sentence, `words`."""
        return Purpose(PurposeKind.TOLD, words=words)

    @property
    def is_told(self) -> bool:
        """Whether nothing is known of it but a sentence."""
        return self.kind == PurposeKind.TOLD

    def sentence(self, layer: str = "") -> str:
        """Renders the purpose in words. `layer`: the name of the layer beside which the sentence stands, if it does:
        names in it then leave out what that name says already (`beside`)."""
        sentence = _SENTENCES[self.kind].format(
            phase=self.phase or "",
            leaf=beside(self.leaf or "", layer),
            source=beside(self.source, layer),
            scheme=self.scheme,
            words=self.words,
            cotangent_of="cotangent of " if self.phase == Phase.BACKWARD else "",
        )
        sentence = f"{sentence}, each worker's in turn" if self.in_turns else sentence
        return f"{sentence}, again where layers are rematerialised" if self.again else sentence

    @property
    def lacking(self) -> str:
        """The name of the first field that its sentence needs and that is empty; empty where none is."""
        needed = (name for _, name, _, _ in string.Formatter().parse(_SENTENCES[self.kind]) if name)
        return next((name for name in needed if name != "cotangent_of" and not getattr(self, name)), "")


def beside(path: str, layer: str) -> str:
    """Returns how `path`, that of an array or a layer, reads beside the name of a `layer`: without what is above it
    there, and "it" for the layer itself. Beside `net/a` the path `net/a/kernel` is `kernel`, and `net/b/kernel` is
    `b/kernel`."""
    if not layer:
        return path
    if path == layer:
        return "it"
    if path.startswith(f"{layer}/"):
        return path[len(layer) + 1 :]
    above = layer.rpartition("/")[0]
    return path[len(above) + 1 :] if above and path.startswith(f"{above}/") else path
