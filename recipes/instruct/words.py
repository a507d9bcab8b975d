"""The material tasks are made of. What training uses and what validation uses have nothing in common."""

from __future__ import annotations


def _words(text: str) -> list[str]:
    """The words of `text`; an underscore stands for a space inside one."""
    return [word.replace("_", " ") for word in text.split()]


WORDS = {
    "train": _words(
        """
        apple anchor barrel basket bell bicycle blanket boat bottle bridge broom bucket button cabin camera
        candle canoe carpet castle chair clock cloud coat coin cradle curtain desk diary donkey drum engine
        fence fire flag flower forest fountain garden glove goat guitar hammer harbor hat horse island jacket
        kettle key kitchen kite ladder lake lamp letter lion map market meadow medal mirror moon mountain
        music needle notebook ocean onion orchard oven owl painting paper path pencil piano pillow plane plate
        """
    ),
    "val": _words(
        """
        lantern rabbit river rocket rope sailor saddle school sheep shovel spoon stable statue storm stove
        suitcase sweater table teacher teapot tent ticket tiger tower tractor train tree trumpet tunnel turtle
        umbrella valley village violin wagon wallet whale wheel whistle window winter wolf
        """
    ),
}

NAMES = {
    "train": _words(
        """
        Adam Alice Anna Arthur Ben Bruno Carla Carmen Clara Daniel David Diana Edgar Elena Emma Eric Eva Felix
        Frank Greta Hanna Hugo Ida Iris Ivan Jack James Jonas Julia Karen Karl Laura Leo Linda Lucas Lucy
        Maria Mark Martin Mary Max Nadia Nina Nora Oliver Oscar Otto Paul Paula Peter
        """
    ),
    "val": _words(
        """
        Rachel Ralph Ray Rita Robert Rosa Ruth Sally Sam Sandra Sarah Simon Sofia Stella Steven Susan Teresa
        Theo Thomas Tina Tom Vera Victor Walter Wendy Willa Xenia Yara Zoe Zack
        """
    ),
}

DOINGS = {
    "train": _words(
        """
        paints_boats sells_bread drives_a_taxi teaches_math plays_chess fixes_clocks grows_roses likes_tea
        runs_a_bakery collects_stamps repairs_shoes sings_jazz
        """
    ),
    "val": _words(
        """
        builds_kites keeps_bees writes_poems studies_law bakes_cakes flies_planes plays_the_harp trains_dogs
        mends_nets draws_maps
        """
    ),
}

# a category: its name in the plural, and its members
CATEGORIES = {
    "train": {
        "animals": _words(
            """
            alligator ant antelope ape bat bear beaver bee bird bison buffalo bull butterfly camel cat cheetah
            chicken chimpanzee cow crab crocodile crow deer dog dolphin donkey duck eagle elephant fish
            flamingo fox frog giraffe goat goose gorilla hamster hawk hippo hippopotamus horse hyena jaguar
            kangaroo koala lamb leopard lion lizard lobster monkey moose mouse octopus orangutan ostrich otter
            owl panda panther parrot peacock penguin pig pigeon polar_bear puma rabbit raccoon rat rhino
            rhinoceros rooster salmon seal shark sheep snake spider squirrel swan tiger toad tortoise turkey
            turtle walrus whale wolf zebra
            """
        ),
        "colors": _words(
            """
            amber aqua azure beige black blue bronze brown burgundy coral crimson cyan dark_blue dark_green
            emerald fuchsia gold gray green grey indigo ivory jade khaki lavender light_blue light_green lilac
            lime magenta maroon mauve mint navy navy_blue ochre olive orange peach pink plum purple red rose
            ruby salmon scarlet silver sky_blue tan teal turquoise violet white yellow
            """
        ),
        "countries": _words(
            """
            afghanistan albania algeria argentina armenia australia austria bangladesh belgium bolivia brazil
            bulgaria cambodia cameroon canada chile china colombia croatia cuba cyprus czech_republic czechia
            denmark ecuador egypt england estonia ethiopia finland france georgia germany ghana greece
            guatemala haiti hungary iceland india indonesia iran iraq ireland israel italy jamaica japan
            jordan kenya korea kuwait laos latvia lebanon libya lithuania luxembourg madagascar malaysia mali
            malta mexico mongolia morocco mozambique myanmar nepal netherlands new_zealand nicaragua niger
            nigeria north_korea norway oman pakistan panama paraguay peru philippines poland portugal qatar
            romania russia rwanda saudi_arabia scotland senegal serbia singapore slovakia slovenia somalia
            south_africa south_korea spain sri_lanka sudan sweden switzerland syria taiwan tanzania thailand
            the_netherlands the_united_kingdom the_united_states tunisia turkey uganda uk ukraine
            united_kingdom united_states united_states_of_america uruguay us usa uzbekistan venezuela vietnam
            wales yemen zambia zimbabwe
            """
        ),
        "sports": _words(
            """
            american_football archery athletics badminton baseball basketball beach_volleyball biathlon
            billiards bobsleigh bowling boxing canoeing climbing cricket curling cycling darts diving fencing
            field_hockey figure_skating fishing football golf gymnastics handball hockey horse_racing
            ice_hockey judo karate kayaking lacrosse marathon ping_pong polo racing rowing rugby running
            sailing shooting skateboarding skating skiing snowboarding soccer softball squash surfing swimming
            table_tennis taekwondo tennis track track_and_field triathlon volleyball water_polo weightlifting
            wrestling yoga
            """
        ),
        "vegetables": _words(
            """
            artichoke arugula asparagus aubergine avocado bean beet beetroot bell_pepper bok_choy broccoli
            brussels_sprout cabbage carrot cauliflower celery chard chickpea collard_green corn courgette
            cucumber eggplant endive fennel garlic ginger green_bean kale kohlrabi leek lentil lettuce
            mushroom okra olive onion parsnip pea pepper potato pumpkin radish red_pepper rhubarb rutabaga
            shallot spinach squash sweet_corn sweet_potato swiss_chard tomato turnip watercress yam zucchini
            """
        ),
        "body parts": _words(
            """
            abdomen ankle arm back beard belly blood bone brain calf cheek chest chin ear elbow eye eyebrow
            eyelash eyelid face feet finger fist foot forehead hair hand head heart heel hip intestine jaw
            kidney knee leg lip liver lung mouth muscle nail neck nose palm pancreas pelvis rib scalp shin
            shoulder skin skull spine stomach teeth thigh throat thumb toe tongue tooth torso waist wrist
            """
        ),
    },
    "val": {
        "fruits": _words(
            """
            apple apricot avocado banana blackberry blackcurrant blueberry cantaloupe cherry clementine
            coconut cranberry currant date dragon_fruit dragonfruit durian elderberry fig gooseberry grape
            grapefruit guava honeydew jackfruit kiwi kiwifruit kumquat lemon lime lychee mandarin mango
            mangosteen melon mulberry nectarine olive orange papaya passion_fruit passionfruit peach pear
            persimmon pineapple plantain plum pomegranate prune quince raisin raspberry starfruit strawberry
            tangerine tomato watermelon
            """
        ),
        "jobs": _words(
            """
            accountant actor actress architect artist astronaut author baker banker barber bartender biologist
            blacksmith builder bus_driver businessman butcher carpenter cashier chef chemist cleaner clerk
            coach composer computer_programmer consultant cook dancer data_scientist dentist designer
            detective developer director doctor driver economist editor electrician engineer entrepreneur
            farmer filmmaker firefighter fisherman florist gardener geologist graphic_designer guard
            hairdresser historian janitor jeweler journalist judge lawyer librarian lifeguard manager
            marketing_manager mason mechanic miner model musician nurse nutritionist painter paramedic
            pharmacist photographer physician physicist pilot plumber poet police_officer policeman politician
            postman priest professor programmer project_manager psychologist receptionist reporter researcher
            sailor sales_manager salesman salesperson scientist sculptor secretary singer social_worker
            software_developer software_engineer soldier surgeon tailor taxi_driver teacher technician
            therapist tour_guide translator truck_driver tutor veterinarian waiter waitress web_developer
            welder writer
            """
        ),
        "cities": _words(
            """
            amsterdam athens atlanta austin baghdad bangkok barcelona beijing berlin bogota boston brussels
            bucharest budapest buenos_aires cairo cambridge cape_town casablanca chicago copenhagen dallas
            delhi denver detroit dresden dubai dublin edinburgh florence frankfurt geneva glasgow hamburg
            hanoi havana helsinki hong_kong houston istanbul jakarta jerusalem johannesburg karachi kiev kyiv
            kyoto lagos las_vegas lima lisbon liverpool london los_angeles lyon madrid manchester manila
            marseille melbourne mexico_city miami milan montreal moscow mumbai munich nairobi naples new_delhi
            new_york new_york_city nice osaka oslo ottawa oxford paris perth philadelphia phoenix portland
            prague rio_de_janeiro riyadh rome san_antonio san_diego san_francisco san_jose santiago sao_paulo
            seattle seoul shanghai singapore stockholm sydney tehran tel_aviv tokyo toronto vancouver venice
            vienna warsaw washington washington_d.c. zurich
            """
        ),
        "drinks": _words(
            """
            ale apple_juice beer black_tea bourbon brandy cappuccino champagne chocolate_milk cider cocktail
            cocoa coconut_water coffee cognac coke cola cranberry_juice energy_drink espresso fruit_juice gin
            ginger_ale grape_juice green_tea herbal_tea hot_chocolate iced_coffee iced_tea juice kombucha
            latte lemonade liqueur margarita martini mead milk milkshake mineral_water mocha mojito
            orange_juice pepsi port red_wine rum sake sherry smoothie soda soft_drink sparkling_water sprite
            tea tequila tomato_juice tonic vermouth vodka water whiskey whisky white_wine wine
            """
        ),
        "instruments": _words(
            """
            accordion acoustic_guitar bagpipe banjo bass bass_drum bass_guitar bassoon bongo cello clarinet
            cornet cymbal didgeridoo double_bass drum drum_set dulcimer electric_guitar euphonium fiddle flute
            french_horn glockenspiel gong guitar harmonica harp harpsichord horn keyboard lute lyre mandolin
            maraca marimba oboe organ percussion piano piccolo recorder saxophone sitar snare_drum steel_drum
            synthesizer tabla tambourine timpani triangle trombone trumpet tuba ukulele vibraphone viola
            violin xylophone
            """
        ),
        "languages": _words(
            """
            afrikaans albanian amharic arabic armenian bengali bosnian bulgarian burmese cantonese catalan
            chinese croatian czech danish dutch english estonian farsi filipino finnish french gaelic georgian
            german greek gujarati hausa hawaiian hebrew hindi hungarian icelandic igbo indonesian irish
            italian japanese khmer korean kurdish latin latvian lithuanian malay maltese mandarin
            mandarin_chinese mongolian nepali norwegian persian polish portuguese punjabi quechua romanian
            russian serbian slovak slovenian somali spanish swahili swedish tagalog tamil telugu thai tibetan
            turkish ukrainian urdu vietnamese welsh xhosa yiddish yoruba zulu
            """
        ),
        "clothes": _words(
            """
            apron beanie belt bikini blazer blouse boot bra cap cape cardigan cloak coat dress dress_shirt
            glove gown hat heel high_heel hoodie jacket jean jeans jewelry jumper kilt kimono legging mitten
            nightgown overall overcoat pajama pant pants parka polo_shirt poncho pullover raincoat robe sandal
            sari scarf shawl shirt shoe short shorts skirt slipper sneaker sock socks stocking suit sunglasses
            sweater sweatpant sweatshirt swimsuit t-shirt tank_top tie tights top trouser tunic tuxedo
            underwear uniform veil vest
            """
        ),
    },
}

# for the grader: what a verb looks like
_VERBS = _words(
    """
    accept act add agree allow answer appear arrive ask attack attract bake balance bark beg believe belong
    blink block boil bounce bow burn call capture care carry catch cause celebrate change charge chase check
    cheer chew circle clean climb close collect color compare complain complete consider contain continue cook
    count cover crack crash crawl create creep cross crush cry curl dance dare decide decorate deliver deserve
    design destroy discover dive drag dream dress drift drip drop dry echo end enjoy enter escape examine
    exist expect explain explore face fade fail fascinate fasten feature fill finish fit fix flap flash
    flicker float flow fold follow frighten gather gaze glide glisten glitter glow grab greet grip guard guide
    handle hang happen harm hate heal help hike hope hover hug hunt hurry imagine impress improve include
    inspire intend invite join jump keep kick kiss knock land last laugh launch lead lean learn lick lift
    light like listen live load lock look love march marvel matter melt mend miss move need notice offer open
    own paint pass pick place plan plant play please point polish pour prefer prepare press pretend produce
    promise protect pull push raise reach receive recommend reflect relax release remain remember remind
    remove repair repeat require rescue reserve rest return reveal roar roll rule rush sail save scare scatter
    scream search seem serve settle shape share shelter shimmer shout show sigh signal sing sip skip slip
    smell smile smoke snore soar solve sound sparkle spill splash squeak stand stare start stay step stop
    store stretch strike study suggest suit support surprise surround survive swallow sway symbolize talk
    taste thank thrive tie touch travel treasure treat try tug turn twinkle use visit wait walk wander want
    warm warn wash watch wave weigh welcome whisper wish wonder work worry wrap yell
    """
)

_IRREGULAR = _words(
    """
    am are is was were be been being has have had having do does did done can could will would shall should
    may might must let lets go goes went gone going get gets got getting come comes came coming see sees saw
    seen seeing say says said make makes made making take takes took taken taking know knows knew known think
    thinks thought find finds found finding give gives gave given giving tell tells told feel feels felt
    become becomes became leave leaves left put puts bring brings brought begin begins began begun write
    writes wrote written hear hears heard hold holds held run runs ran running stood set sets sit sits sat
    sitting meet meets met pay pays paid speak speaks spoke read reads lie lies lay led grow grows grew grown
    lose loses lost fall falls fell fallen send sends sent build builds built understand understood draw draws
    drew drawn break breaks broke broken spend spends spent cut cuts rise rises rose drive drives drove driven
    buy buys bought wear wears wore worn choose chooses chose chosen fly flies flew flown flying eat eats ate
    eaten drink drinks drank sleep sleeps slept sang swim swims swam win wins won throw throws threw hit hits
    shine shines shone blow blows blew blown ring rings rang rung sell sells sold teach teaches taught fight
    fights fought hide hides hid hidden ride rides rode ridden shake shakes shook sink sinks sank sweep sweeps
    swept swing swings swung spin spins spun spread spreads stick sticks stuck steal steals stole tear tears
    tore wake wakes woke bite bites bit forget forgets forgot hung kept lit caught crept struck mean means
    meant bend bends bent dig digs dug feed feeds fed lend lends lent seek seeks sought shut shuts weave
    weaves wove
    """
)


def _forms(verb: str) -> list[str]:
    """The regular forms of a verb, and some that do not exist: nobody writes those."""
    stem = verb[:-1] if verb.endswith("e") else verb
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return [verb, verb[:-1] + "ies", verb[:-1] + "ied", verb + "ing"]
    third = verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z")) else "s")
    doubled = [verb + verb[-1] + "ed", verb + verb[-1] + "ing"]
    return [verb, third, stem + "ed", stem + "ing", *doubled]


VERB_FORMS = frozenset(_IRREGULAR).union(*map(_forms, _VERBS))
DETERMINERS = frozenset(
    _words("a an the my your his her its our their this that these those some any no every of in on")
)
