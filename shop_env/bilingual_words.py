"""The words of the bilingual synthetic shop: what it sells, what can be said of it, and how shoppers ask, in English and Chinese.

Both languages share one structure, so a seed gives the same shop in either. Inside a domain no word contains or resembles another (a test
checks it with the reward's own rule), so that what a text says can be told without doubt.
"""

import dataclasses
from collections.abc import Mapping

_COLOURS = "black=黑色, white=白色, red=红色, blue=蓝色, green=绿色, grey=灰色, pink=粉色, beige=米色"
_WEAR_STYLE = "casual=休闲, business=商务, vintage=复古, sporty=运动风, minimalist=极简, bohemian=波西米亚"
_HOME_STYLE = "nordic=北欧风, vintage=复古, minimalist=极简, pastoral=田园, luxurious=轻奢, japanese=日式"
_PATTERN = "striped=条纹, floral=碎花, plaid=格纹, dotted=波点, camouflage=迷彩, embroidered=刺绣"

# Per domain: kinds, lowest and highest base price, the second option axis with its values, and facets with their values.
_DOMAINS: dict[str, tuple[str, tuple[int, int], str, str, dict[str, str]]] = {
    "clothing=服装": (
        "jacket=夹克, shirt=衬衫, dress=连衣裙, sweater=毛衣, trousers=长裤",
        (59, 399),
        "size=尺码",
        "S=S, M=M, L=L, XL=XL, XXL=XXL",
        {
            "material=材质": "cotton=纯棉, linen=亚麻, wool=羊毛, silk=真丝, polyester=涤纶, denim=牛仔布",
            "style=风格": _WEAR_STYLE,
            "function=功能": "waterproof=防水, breathable=透气, windproof=防风, quick-dry=速干, wrinkle-free=免烫, stretchy=弹力",
            "pattern=图案": _PATTERN,
        },
    ),
    "shoes=鞋靴": (
        "sneakers=运动鞋, boots=靴子, sandals=凉鞋, loafers=乐福鞋, slippers=拖鞋",
        (79, 599),
        "shoe size=鞋码",
        "EU 36=36码, EU 38=38码, EU 40=40码, EU 42=42码, EU 44=44码",
        {
            "material=材质": "leather=真皮, suede=绒面, canvas=帆布, mesh=网布, rubber=橡胶, knitted=飞织",
            "style=风格": _WEAR_STYLE,
            "function=功能": "non-slip=防滑, cushioned=缓震, lightweight=轻便, insulated=保暖, waterproof=防水, odour-resistant=防臭",
            "closure=闭合方式": "lace-up=系带, velcro=魔术贴, zippered=拉链, step-in=一脚蹬, buckled=搭扣, elastic=松紧带",
        },
    ),
    "bags=箱包": (
        "backpack=双肩包, suitcase=行李箱, handbag=手提包, wallet=钱包, briefcase=公文包",
        (49, 699),
        "size=规格",
        "small=小号, medium=中号, large=大号, jumbo=巨无霸",
        {
            "material=材质": "leather=真皮, nylon=尼龙, canvas=帆布, polyester=涤纶, cork=软木, felt=毛毡",
            "style=风格": _WEAR_STYLE,
            "function=功能": "waterproof=防水, anti-theft=防盗, expandable=可扩容, foldable=可折叠, shockproof=防震, ventilated=透气",
            "pattern=图案": _PATTERN,
        },
    ),
    "bedding=家纺": (
        "pillow=枕头, blanket=毛毯, curtain=窗帘, rug=地毯, bedsheet=床单",
        (29, 499),
        "width=宽幅",
        "standard=标准, wide=加宽, oversize=超大, slim=窄版",
        {
            "material=材质": "cotton=纯棉, linen=亚麻, silk=真丝, bamboo=竹纤维, microfibre=涤纶, wool=羊毛",
            "style=风格": _HOME_STYLE,
            "function=功能": "antibacterial=抗菌, cooling=凉感, hypoallergenic=低敏, washable=可机洗, blackout=遮光, mite-proof=防螨",
            "pattern=图案": _PATTERN,
        },
    ),
    "kitchen=厨具": (
        "frying pan=煎锅, kettle=水壶, mug=马克杯, lunch box=饭盒, chopping board=砧板",
        (19, 399),
        "size=规格",
        "small=小号, medium=中号, large=大号, jumbo=巨无霸",
        {
            "material=材质": "stainless steel=不锈钢, ceramic=陶瓷, glass=玻璃, cast iron=铸铁, titanium=纯钛, bamboo=竹制",
            "style=风格": _HOME_STYLE,
            "function=功能": "heat-retaining=保温, leakproof=防漏, machine-safe=可机洗, stackable=可叠放, induction-ready=电磁炉用, graded=带刻度",
            "finish=表面": "matte=哑光, polished=抛光, hammered=锤纹, brushed=拉丝, enamelled=珐琅, marbled=石纹",
        },
    ),
    "electronics=数码": (
        "headphones=耳机, keyboard=键盘, mouse=鼠标, speaker=音箱, power bank=充电宝",
        (39, 899),
        "edition=版本",
        "basic=基础, professional=专业, deluxe=豪华, limited=限定",
        {
            "connection=连接方式": "bluetooth=蓝牙, wired=有线, dual-mode=双模, infrared=红外, magnetic=磁吸, optical=光纤",
            "style=风格": "gaming=电竞, office=办公, retro=复古, minimalist=极简, childlike=童趣, portable=便携",
            "function=功能": "noise-free=降噪, fast-charging=快充, backlit=背光, splash-proof=防泼溅, voice-operated=声控, long-lasting=长续航",
            "material=材质": "aluminium=铝合金, plastic=塑料, wooden=木质, carbon fibre=碳纤维, silicone=硅胶, fabric=织物",
        },
    ),
    "beauty=美妆": (
        "lipstick=口红, sunscreen=防晒霜, shampoo=洗发水, face cream=面霜, perfume=香水",
        (25, 459),
        "volume=容量",
        "30 ml=30ml, 50 ml=50ml, 100 ml=100ml, 200 ml=200ml",
        {
            "skin=肤质": "oily-skin=油性, dry-skin=干性, sensitive=敏感肌, mature=熟龄, acne-prone=痘痘肌, combination=混合肤质",
            "scent=香型": "rose=玫瑰, lavender=薰衣草, citrus=柑橘, unscented=无香, jasmine=茉莉, sandalwood=檀木",
            "function=功能": "moisturising=保湿, brightening=提亮, soothing=舒缓, smudge-proof=不脱妆, oil-control=控油, repairing=修护",
            "ingredient=成分": "hyaluronic acid=玻尿酸, vitamin C=维生素C, aloe=芦荟, tea tree=茶树, collagen=胶原蛋白, ceramide=神经酰胺",
        },
    ),
    "outdoor=户外": (
        "tent=帐篷, sleeping bag=睡袋, flashlight=手电筒, yoga mat=瑜伽垫, climbing rope=登山绳",
        (35, 799),
        "set=套装",
        "solo=单人, couple=双人, family=家庭, club=团队",
        {
            "material=材质": "nylon=尼龙, canvas=帆布, aluminium=铝合金, silicone=硅胶, cork=软木, polyester=涤纶",
            "style=风格": "ultralight=超轻, rugged=硬派, military=军旅, retro=复古, minimalist=极简, vibrant=撞色",
            "function=功能": "waterproof=防水, windproof=防风, sun-blocking=防晒, foldable=可折叠, thermal=保温, reflective=反光",
            "season=季节": "summer=夏季, winter=冬季, spring=春季, autumn=秋季, all-season=四季通用, monsoon=雨季",
        },
    ),
}

_BRANDS = (
    "Acme=云杉, Nova=北岸, Zephyr=朗途, Orion=青禾, Lumen=木槿, Tundra=拾光, Cobalt=禾本, Maple=星野, Vertex=远山, Harbor=鲸屿, Summit=映月, "
    "Ember=知遇, Willow=初见, Atlas=南屿, Pioneer=泊客, Quartz=安可, Meridian=维度, Halcyon=雅集, Juniper=松果, Solstice=凌云"
)
_EXTRAS = (
    "free returns=七天无理由退货, ships in two days=两日内发货, gift box included=附赠礼盒, one-year warranty=一年质保, new this month=本月上新, "
    "top rated=好评如潮, made to order=按单制作, carbon neutral shipping=绿色配送"
)
_CITIES = (
    "London=浙江杭州, Leeds=江苏苏州, Dublin=四川成都, Toronto=广东广州, Austin=湖北武汉, Denver=陕西西安, Boston=山东青岛, Seattle=湖南长沙, "
    "Sydney=福建厦门, Auckland=云南昆明"
)
_JOBS = "teacher=教师, engineer=工程师, nurse=护士, student=学生, chef=厨师, accountant=会计, designer=设计师, driver=司机, farmer=农户, lawyer=律师"
_PERSONA = (
    "user id=用户ID, location=地区信息, demographics=人口属性, interests=兴趣偏好, gender=性别, age=年龄, occupation=职业, "
    "favourite categories=类目偏好, product preferences=商品属性偏好, price range=价格区间, brand=品牌, colour=颜色"
)
_GENDERS = "woman=女, man=男"
_PRICE_RANGES = "economical=偏低, moderate=中等, premium=偏高"

# {attributes}, {kind}, {option} and {budget} are filled in; {option} and {budget} bring their own leading comma where they are not empty.
_TEMPLATES = {
    "en": (
        "I want to buy: {kind}, {attributes}{option}{budget}",
        "Please find me this: {attributes} {kind}{option}{budget}",
        "My next purchase is the {attributes} {kind}{option}{budget}",
        "Looking for {attributes} {kind}{option}{budget}",
    ),
    "zh": (
        "想买一款{attributes}的{kind}{option}{budget}",
        "帮我找{attributes}的{kind}{option}{budget}",
        "最近需要{kind}，要{attributes}的{option}{budget}",
        "给我挑一款{kind}，希望是{attributes}{option}{budget}",
    ),
}
_OPTION = {"en": ", {axis} {value}", "zh": "，{axis}选{value}"}
_TASTE = {"en": (". Everything else to my usual taste.", "."), "zh": ("。其他按我平时的喜好来。", "。")}
_BUDGETS = {
    "en": {
        "upper": (", under ${n}", ", no more than ${n}", ", my budget is ${n}"),
        "about": (", around ${n}", ", about ${n}"),
        "range": (", between ${low} and ${n}", ", ${low}-${n}"),
    },
    "zh": {
        "upper": ("，价格不超过{n}元", "，预算{n}元以内", "，{n}元以下"),
        "about": ("，预算{n}元左右", "，价格大约{n}元"),
        "range": ("，价格在{low}到{n}元之间", "，预算{low}-{n}元"),
    },
}


@dataclasses.dataclass(frozen=True)
class Domain:
    """A group of kinds that share their facets and option axes.

    Attributes:
      name: first node of the category path; the kind is the second.
      kinds: what is sold.
      prices: lowest and highest base price.
      axis: name of the second option axis (the first is the colour).
      values: what the second axis offers.
      facets: name -> values; every product has one value of each.
    """

    name: str
    kinds: tuple[str, ...]
    prices: tuple[int, int]
    axis: str
    values: tuple[str, ...]
    facets: Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Language:
    """All words of one language; `persona` maps the English name of a persona's field to its name here."""

    code: str
    domains: tuple[Domain, ...]
    colours: tuple[str, ...]
    brands: tuple[str, ...]
    extras: tuple[str, ...]
    cities: tuple[str, ...]
    jobs: tuple[str, ...]
    genders: tuple[str, ...]
    price_ranges: tuple[str, ...]
    persona: Mapping[str, str]
    templates: tuple[str, ...]
    option: str
    taste: tuple[str, str]  # the sentence's end with and without preferences that count
    budgets: Mapping[str, tuple[str, ...]]

    @property
    def comma(self) -> str:
        """Between attributes."""
        return "、" if self.code == "zh" else ", "

    def domain_of(self, kind: str) -> Domain:
        return next(domain for domain in self.domains if kind in domain.kinds)


def _side(pairs: str, code: str) -> tuple[str, ...]:
    return tuple(pair.split("=")[code == "zh"] for pair in pairs.split(", "))


def _language(code: str) -> Language:
    domains = tuple(
        Domain(
            name=_side(name, code)[0],
            kinds=_side(kinds, code),
            prices=prices,
            axis=_side(axis, code)[0],
            values=_side(values, code),
            facets={_side(facet, code)[0]: _side(words, code) for facet, words in facets.items()},
        )
        for name, (kinds, prices, axis, values, facets) in _DOMAINS.items()
    )
    words = {
        name: _side(pairs, code)
        for name, pairs in (
            ("colours", _COLOURS),
            ("brands", _BRANDS),
            ("extras", _EXTRAS),
            ("cities", _CITIES),
            ("jobs", _JOBS),
            ("genders", _GENDERS),
            ("price_ranges", _PRICE_RANGES),
        )
    }
    persona = dict(zip(_side(_PERSONA, "en"), _side(_PERSONA, code), strict=True))
    return Language(
        code=code,
        domains=domains,
        persona=persona,
        templates=_TEMPLATES[code],
        option=_OPTION[code],
        taste=_TASTE[code],
        budgets=_BUDGETS[code],
        **words,
    )


LANGUAGES = {code: _language(code) for code in ("en", "zh")}
