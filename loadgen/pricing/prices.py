"""The kinds of price, the fields of each in a price file, and the choice of the price for a target.

Pure, and without arithmetic: no default price, date or rate is guessed. Amounts are `decimal.Decimal`. `price_file.py`
reads and checks the file as a whole; `unit_cost.py` computes costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal

from loadgen_sdk import price_file
from loadgen_sdk.errors import WrongUse
from loadgen_sdk.price_file import CHECKS, UNDATED, PerToken
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    Strict,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)

from loadgen.core.errors import UserError, did_you_mean
from loadgen.core.results.manifest import TargetFacts
from loadgen.core.units import Wrong
from loadgen.core.workload.file_models import Part

NOT_VERIFIED = "not verified"  # the quality of an entry that only records that its price is missing
NO_SOURCE = "not stated"  # the source of a price that a copy gives without one


def _validator(check: Callable[[object], Any]) -> BeforeValidator:
    """Return a validator that makes a check of the SDK and raises its error as `Wrong`."""

    def validate(value: Any) -> Any:
        try:
            return check(value)
        except WrongUse as error:
            raise Wrong(error.code, error.what, error.hint) from None

    return BeforeValidator(validate)


def _between(low: str, high: str, noun: str) -> AfterValidator:
    """Return a validator that refuses numbers outside [low, high] as not being `noun`."""

    def check(value: Decimal) -> Decimal:
        if not Decimal(low) <= value <= Decimal(high):
            raise Wrong("out_of_range", f"is not {noun}", f"from {low} to {high}")
        return value

    return AfterValidator(check)


_number = _validator(price_file.number)
Amount = Annotated[Decimal, _validator(price_file.amount)]
Currency = Annotated[str, _validator(price_file.currency)]
# The year alone is an integer in YAML.
AsOf = Annotated[
    str,
    _validator(price_file.as_of),
    WithJsonSchema({"type": ["string", "integer"]}),
]
Text = Annotated[str, _validator(price_file.filled), Field(min_length=1)]
Gpus = Annotated[int, Strict(), Field(ge=1, le=100_000)]


class Energy(Part):
    """The power of one machine (shape) and who pays it. `counted` puts it into one place, never into two:

    `included`: the price has it in it already, energy is shown in kWh and joules and not in money; `hourly`: `watts` at
    all hours is part of the hourly price; `by_load`: `idle_watts` is part of the hourly price (a machine that waits
    burns it), what load adds is the energy term.
    """

    synonyms: ClassVar[dict[str, str]] = {
        "power": "watts",
        "power_w": "watts",
        "usd_per_kwh": "per_kwh",
    }

    watts: Amount  # under the measured load, at the machine's plug
    idle_watts: Annotated[Decimal, _number, Field(ge=0)] | None = None
    pue: Annotated[Decimal, _number, _between("1", "3", "a power usage effectiveness")]
    per_kwh: Amount | None = None
    counted: Literal["included", "hourly", "by_load"]


class _Machines(Part):
    """What a price of machines carries beside its own: whose it is, where it is from, and what each costs a month."""

    name: str = ""  # by which `--price DIR=NAME` and the reports call it; made from provider and shape when left out
    provider: Text
    currency: Currency | None = None  # of the file when left out
    as_of: AsOf
    source: Text
    quality: str = ""
    commitment: str = ""  # on demand, 1 year, spot, ...
    region: str = ""
    egress_per_gb: Amount | None = None  # per 1e9 bytes that leave the provider
    # of one machine; of one GPU, where it is sold by the GPU
    storage_per_month: Amount | None = None  # disks, images, results
    support_per_month: Amount | None = None  # a contract with the provider


LostShare = Annotated[Decimal, _number, _between("0.001", "0.9", "a share of the paid time")]


class Rented(_Machines):
    """Machines by the hour. `per_hour` is a whole machine's price, `per_gpu_hour` one GPU's; exactly one is given."""

    synonyms: ClassVar[dict[str, str]] = {
        "usd_per_gpu_hour": "per_gpu_hour",
        "usd_per_hour": "per_hour",
    }
    synonyms |= {
        "price": "per_hour",
        "instance": "shape",
        "date": "as_of",
        "gpus_per_shape": "gpus",
    }

    shape: str = (
        ""  # as in `loadgen run --shape`; without it the price is chosen by `--price DIR=NAME`
    )
    gpu: Text
    gpus: Gpus | None = None  # of a machine: with it, whole machines are paid
    per_hour: Amount | None = None
    per_gpu_hour: Amount | None = None
    lost_share: LostShare | None = (
        None  # of spot machines: to work that interruptions lose, and starting again
    )
    energy: Energy | None = None
    why_missing: str = (
        ""  # of an entry that only records that its price is missing: what was looked at
    )


class Owned(_Machines):
    """Machines that were bought. The hourly price is the capital written off evenly over `years` of 8,760 hours, staff
    (`staff_share` of the capital each year: people, space, support) and what of the power `energy.counted` puts there.
    With a `discount` the capital is an annuity at that interest instead.
    """

    provider: Text = "own"
    shape: str = ""
    gpu: Text
    gpus: Gpus  # that the capital bought; a run on fewer pays its part
    capital: Amount
    years: Annotated[Decimal, _number, _between("0.5", "20", "a time of writing off, in years")]
    staff_share: Annotated[Decimal, _number, _between("0", "1", "a share of the capital per year")]
    energy: Energy
    discount: Annotated[Decimal, _number, _between("0.001", "1", "an interest per year")] | None = (
        None
    )


_TYPES_BY_CHECK: dict[Callable[[object], object], Any] = {
    price_file.amount_or_zero: Annotated[Decimal, _validator(price_file.amount_or_zero)],
    price_file.as_of: AsOf,
    price_file.currency: Currency,
    price_file.filled: Text,
    price_file.text: str,
    price_file.token_threshold: Annotated[int, _validator(price_file.token_threshold), Field(ge=1)],
}


def _token_price_field(name: str, default: Any) -> tuple[Any, Any]:
    """Return the type and the default of a key of a price by the token."""
    field_type = _TYPES_BY_CHECK[CHECKS[name]]
    if default is NODEFAULT:
        return field_type, ...
    if default is None:
        return field_type | None, None
    return field_type, default


def _token_price_model() -> type[Part]:
    """Build the model of a price by the token from the keys and checks of the SDK."""
    keys: dict[str, Any] = {
        key.name: _token_price_field(key.name, key.default) for key in fields(PerToken)
    }
    model = create_model("PerToken", __base__=Part, __doc__=PerToken.__doc__, **keys)
    model.synonyms = dict(PerToken.synonyms)
    return model


_WrittenPerToken = _token_price_model()


def _validate_token_price(value: Any, info: ValidationInfo) -> PerToken:
    written = _WrittenPerToken.model_validate(value, context=info.context)
    price = PerToken(**dict(written))
    try:
        price_file.check_tiers(price)
    except WrongUse as wrong:
        raise Wrong(wrong.code, wrong.what, wrong.hint) from None
    return price


TokenPrice = Annotated[
    PerToken,
    PlainValidator(_validate_token_price, json_schema_input_type=_WrittenPerToken),
]

Price = Rented | Owned | PerToken


class ExchangeRate(Part):
    """One `from` is worth `rate` of `to`. Nothing is inverted and nothing is chained: what is needed is written."""

    from_: Currency = Field(validation_alias="from")
    to: Currency
    rate: Amount
    as_of: AsOf
    source: Text


class WrittenPrices(Part):
    """What a price file may say."""

    currency: Currency
    sample: bool = False  # not anybody's offer: needs --accept-sample-prices
    notes: str = ""
    exchange: tuple[ExchangeRate, ...] = ()
    rented: tuple[Rented, ...] = ()
    owned: tuple[Owned, ...] = ()
    per_token: tuple[TokenPrice, ...] = ()


class Prices(Struct, frozen=True, kw_only=True):
    """Checked prices, all in `currency`. `at`: name of a price -> its place, file:line:column."""

    file: str
    currency: str
    sample: bool
    notes: str
    entries: tuple[Price, ...]
    at: Mapping[str, str]
    exchanged: tuple[str, ...]  # the exchange rates used, in words


def find(
    prices: Prices, target: TargetFacts, chosen: str = "", result: str = ""
) -> tuple[Price, ...]:
    """The prices of a target. More than one only where they differ in commitment alone.

    The price named `chosen` if given. Else, for a target with a shape, the prices of that shape (and region, where both
    give one). Else the prices of its model and URL. Raises UserError when there is none, or when several providers,
    regions or kinds of price match.
    """
    used_by = f", which {result} ran on" if result else ""
    if chosen:
        matching = [price for price in prices.entries if price.name == chosen]
        if not matching:
            raise UserError(
                "unknown_name",
                f'no price is called "{chosen}"',
                prices.file,
                did_you_mean(chosen, list(prices.at)),
            )
    elif target.shape:
        matching = [price for price in prices.entries if _matches_shape(price, target)]
    else:
        matching = [price for price in prices.entries if _matches_model(price, target)]
    if not matching:
        hint = _supply_hint(target, prices, result)
        raise UserError(
            "no_price", f"no price for {_target_words(target)}{used_by}", prices.file, hint
        )
    offers = {(price.provider.lower(), price.region.lower(), type(price)) for price in matching}
    if len(offers) > 1:
        places = ", ".join(f"{price.name} ({prices.at[price.name]})" for price in matching)
        hint = f"choose by --price '{result or 'DIR'}=NAME': {places}"
        raise UserError(
            "ambiguous", f"several prices for {_target_words(target)}{used_by}", prices.file, hint
        )
    for price in matching:
        if isinstance(price, Rented) and price.per_hour is None and price.per_gpu_hour is None:
            why = f": {price.why_missing}" if price.why_missing else ""
            rented = [p for p in prices.entries if isinstance(p, Rented) and p.gpu == price.gpu]
            others = [p.name for p in rented if p.per_hour or p.per_gpu_hour]
            hint = "supply per_hour or per_gpu_hour, with as_of and source: nobody has verified one"
            if others:
                hint += f"; another provider's, as a stand-in: --price '{result or 'DIR'}=NAME' with {', '.join(others)}"
            raise UserError(
                "no_price", f"{price.name} has no price{why}", prices.at[price.name], hint
            )
    return tuple(matching)


def dated(price: Price) -> str:
    """The commitment, date, source and quality of a price in words, to show beside it."""
    date_words = UNDATED if price.as_of == UNDATED else f"as of {price.as_of}"
    source = "no source stated" if price.source == NO_SOURCE else price.source
    return ", ".join(filter(None, (price.commitment, date_words, source, price.quality)))


def _matches_shape(price: Price, target: TargetFacts) -> bool:
    if isinstance(price, PerToken) or price.shape.lower() != target.shape.lower():
        return False
    return not price.region or not target.region or price.region.lower() == target.region.lower()


def _matches_model(price: Price, target: TargetFacts) -> bool:
    if not isinstance(price, PerToken) or price.model.lower() != target.model.lower():
        return False
    return target.url.startswith(price.url)


def _target_words(target: TargetFacts) -> str:
    if target.shape:
        return f"the shape {target.shape}" + (f" in {target.region}" if target.region else "")
    return f"the model {target.model or '(none said)'} at {target.url or target.name or 'an unknown URL'}"


def _supply_hint(target: TargetFacts, prices: Prices, result: str) -> str:
    if target.shape:
        advice = f"supply rented: (or owned:) with shape: {target.shape}, per_hour, gpus, as_of and source"
    else:
        shapes = dict.fromkeys(
            price.shape for price in prices.entries if not isinstance(price, PerToken)
        )
        known = ", ".join(filter(None, shapes))
        machines = f"a machine has the price of its --shape{f' ({known})' if known else ''}, with --gpus, when running"
        keys = f"model: {target.model or 'NAME'}, per_million_input, per_million_output, as_of and source"
        advice = f"{machines}; a model is supplied under per_token: with {keys}"
    # a run has no flag that names a price: it is chosen later, of its result
    return (
        f"--price '{result}=NAME', one of: {', '.join(prices.at)}; or {advice}"
        if result
        else advice
    )
